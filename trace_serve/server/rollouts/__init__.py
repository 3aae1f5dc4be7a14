"""What is kept of a rollout: its record and its hint files."""
