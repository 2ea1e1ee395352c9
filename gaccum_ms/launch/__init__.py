"""The launcher: processes that train together are started, watched and ended. Nothing here imports MindSpore."""
