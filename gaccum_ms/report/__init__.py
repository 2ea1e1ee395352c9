"""The report: what a WindowMonitor has recorded, as one HTML page. Nothing here imports MindSpore."""
