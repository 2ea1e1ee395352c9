"""The report: a WindowMonitor's records as one HTML page. Nothing here imports MindSpore."""
