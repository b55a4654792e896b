"""How a run is watched: metrics.jsonl, trackers, console, alerts, the glossary and the report."""
