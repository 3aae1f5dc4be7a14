"use strict";
(() => {
  const section = document.getElementById("flips");
  if (!section) return;
  const items = Array.from(section.querySelectorAll("details"));
  const selects = Array.from(section.querySelectorAll("select"));
  const search = section.querySelector("input");
  const count = section.querySelector(".count");
  const texts = new Map(items.map((item) => [item, item.textContent.toLowerCase()]));
  const apply = () => {
    const wanted = search.value.trim().toLowerCase();
    let shown = 0;
    for (const item of items) {
      const fits = selects.every((select) => !select.value || item.dataset[select.name] === select.value);
      item.hidden = !(fits && texts.get(item).includes(wanted));
      if (!item.hidden) shown += 1;
    }
    count.textContent = `${shown} of ${items.length} shown`;
  };
  section.querySelector(".controls").hidden = false;
  for (const control of [...selects, search]) control.addEventListener("input", apply);
  apply();
})();
