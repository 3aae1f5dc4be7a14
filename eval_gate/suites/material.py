"""The words from which the shipped query sets are made: plain data, split in two disjoint halves by the generator."""

from __future__ import annotations

PRODUCTS = (
    "kettle", "headphones", "desk lamp", "running shoes", "backpack", "keyboard", "toaster", "rain jacket",
    "office chair", "camera", "water bottle", "blender", "phone case", "monitor", "wool sweater", "bike helmet",
    "coffee grinder", "tent", "speaker", "wristwatch", "vacuum cleaner", "garden hose", "sunglasses", "tablet",
)  # fmt: skip

ROUTING: dict[str, tuple[str, ...]] = {
    "billing": (
        "I was charged twice for the {p}.",
        "The invoice for the {p} shows the wrong total.",
        "My card was billed but I cancelled the {p}.",
        "Please send me a receipt for the {p}.",
        "The discount code was not applied to the price of the {p}.",
        "I still wait for the refund of the {p}.",
        "Why is there an extra fee on my bill for the {p}?",
        "My payment for the {p} was declined, but the money is gone.",
        "I need an invoice with my company's tax number for the {p}.",
        "You took 20 dollars too much for the {p}.",
        "Can I pay for the {p} in two instalments?",
        "The price I paid for the {p} is not the price on the website.",
    ),
    "shipping": (
        "My {p} has not arrived yet.",
        "The tracking page says the {p} is lost.",
        "The parcel with the {p} went to the wrong address.",
        "When will the {p} be delivered?",
        "The box of the {p} was crushed on the way.",
        "The courier never came with my {p}.",
        "Can you send the {p} by express delivery?",
        "The {p} has been stuck in customs for a week.",
        "I have moved; please deliver the {p} to my new address.",
        "I got somebody else's package instead of the {p}.",
        "The tracking number of the {p} does not work.",
        "The driver left the {p} in the rain at my door.",
    ),
    "technical": (
        "The {p} does not turn on.",
        "The {p} broke after two days of use.",
        "The app crashes when I look at the {p}.",
        "How do I reset the {p}?",
        "The {p} makes a strange noise.",
        "The website shows an error when I open the {p} page.",
        "The {p} stopped working this morning.",
        "The manual of the {p} does not explain the set-up.",
        "A part of the {p} is loose and keeps falling off.",
        "The update failed and now the {p} is frozen.",
        "The search does not load any results for {p}.",
        "The {p} overheats after ten minutes.",
    ),
    "account": (
        "I forgot my password and want to buy the {p}.",
        "I cannot log in to see my {p} order.",
        "Please change the e-mail address of my profile before I buy the {p}.",
        "Someone else used my login to order a {p}.",
        "How do I delete my user profile? I only wanted the {p}.",
        "My login is locked since I looked at the {p}.",
        "The verification code never comes when I sign in for the {p}.",
        "I want to change my user name before I review the {p}.",
        "I signed up twice and need my two profiles merged to find the {p}.",
        "I do not want your newsletter about the {p}; update my profile.",
        "My password reset link has expired, I wanted to order the {p}.",
        "Two-factor sign-in fails when I want to see the {p}.",
    ),
}

CAPITALS: tuple[tuple[str, str], ...] = (
    ("France", "Paris"), ("Italy", "Rome"), ("Germany", "Berlin"), ("Spain", "Madrid"), ("Portugal", "Lisbon"),
    ("Japan", "Tokyo"), ("Egypt", "Cairo"), ("Greece", "Athens"), ("Austria", "Vienna"), ("Norway", "Oslo"),
    ("Sweden", "Stockholm"), ("Finland", "Helsinki"), ("Denmark", "Copenhagen"), ("Ireland", "Dublin"),
    ("Poland", "Warsaw"), ("Hungary", "Budapest"), ("Russia", "Moscow"), ("China", "Beijing"), ("Cuba", "Havana"),
    ("Peru", "Lima"), ("Chile", "Santiago"), ("Canada", "Ottawa"), ("Kenya", "Nairobi"), ("Thailand", "Bangkok"),
    ("Vietnam", "Hanoi"), ("Iraq", "Baghdad"), ("Iran", "Tehran"), ("Syria", "Damascus"), ("Belgium", "Brussels"),
    ("Romania", "Bucharest"), ("Bulgaria", "Sofia"), ("Serbia", "Belgrade"), ("Ukraine", "Kyiv"),
    ("Nepal", "Kathmandu"), ("Indonesia", "Jakarta"), ("Lebanon", "Beirut"), ("Morocco", "Rabat"),
    ("Tunisia", "Tunis"), ("Iceland", "Reykjavik"), ("Argentina", "Buenos Aires"), ("Venezuela", "Caracas"),
    ("South Korea", "Seoul"), ("Cambodia", "Phnom Penh"), ("Afghanistan", "Kabul"), ("Croatia", "Zagreb"),
    ("Slovakia", "Bratislava"), ("Latvia", "Riga"), ("Jordan", "Amman"), ("Uruguay", "Montevideo"),
    ("Ethiopia", "Addis Ababa"), ("Ghana", "Accra"), ("Senegal", "Dakar"),
)  # fmt: skip

OPPOSITES: tuple[tuple[str, str], ...] = (
    ("hot", "cold"), ("big", "small"), ("day", "night"), ("up", "down"), ("wet", "dry"), ("fast", "slow"),
    ("rich", "poor"), ("old", "new"), ("happy", "sad"), ("open", "closed"), ("light", "dark"), ("early", "late"),
    ("full", "empty"), ("strong", "weak"), ("hard", "soft"), ("high", "low"), ("loud", "quiet"), ("love", "hate"),
    ("win", "lose"), ("left", "right"), ("inside", "outside"), ("buy", "sell"), ("war", "peace"), ("thick", "thin"),
    ("clean", "dirty"), ("true", "false"), ("deep", "shallow"), ("first", "last"),
)  # fmt: skip

POSITIVE = (
    "I love this {p}, it works perfectly.",
    "The best {p} I have ever owned.",
    "Great quality, and the {p} looks beautiful.",
    "My family enjoys the {p} every day.",
    "The {p} is worth every cent.",
    "Very happy with the {p}, would buy it again.",
    "The {p} arrived early and is wonderful.",
    "What a fantastic {p}, five stars.",
    "The {p} is even better than I hoped.",
    "Excellent {p}, I recommend it to everyone.",
    "I am delighted with the {p}.",
    "A superb {p} at a fair price.",
)
NEGATIVE = (
    "I hate this {p}, it broke at once.",
    "The worst {p} I have ever owned.",
    "Poor quality, and the {p} looks cheap.",
    "The {p} is a waste of money.",
    "Very disappointed with the {p}, never again.",
    "The {p} arrived late and is useless.",
    "What a terrible {p}, one star.",
    "The {p} is even worse than I feared.",
    "Awful {p}, I warn everyone about it.",
    "The {p} smells bad and feels flimsy.",
    "I am angry about the {p}.",
    "I returned the {p} after one hour.",
)

FIRST_NAMES = (
    "anna", "ben", "carla", "david", "elena", "frank", "grace", "hugo", "irene", "jack", "karin", "leo", "maria",
    "nils", "olga", "peter", "rosa", "sven", "tina", "victor", "wendy", "yusuf", "zoe", "martin",
)  # fmt: skip
LAST_NAMES = (
    "adams", "berg", "costa", "dunn", "evans", "fisher", "gomez", "hill", "ito", "jones", "klein", "lopez", "meyer",
    "novak", "olsen", "price", "quinn", "rossi", "silva", "turner", "ullman", "vega", "weber", "young",
)  # fmt: skip
DOMAINS = ("mail.com", "post.net", "inbox.org", "web.io")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
          "December")  # fmt: skip

ROUTING_SHOTS = (
    ("I paid too much for the mug.", "billing"),
    ("The mug is not here yet.", "shipping"),
    ("I cannot sign in.", "account"),
    ("The mug does not work.", "technical"),
    ("Refund my money for the mug.", "billing"),
    ("The delivery is late.", "shipping"),
    ("Change my password.", "account"),
    ("The screen is broken.", "technical"),
)
ARITHMETIC_SHOTS = (
    ("What is 2 + 3?", "2 + 3 = 5"),
    ("What is 8 - 2?", "8 - 2 = 6"),
    ("What is 4 * 2?", "4 * 2 = 8"),
)
SENTIMENT_SHOTS = (
    ("The mug is ugly.", "bad"),
    ("The mug is lovely.", "good"),
    ("My mug broke.", "bad"),
    ("A nice mug.", "good"),
    ("I dislike the mug.", "bad"),
    ("I like it a lot.", "good"),
)
