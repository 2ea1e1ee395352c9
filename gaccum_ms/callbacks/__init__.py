"""Callbacks of `ms.Model.train`."""
