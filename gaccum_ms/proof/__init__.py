"""The loss is measured at the first batch: what its parts say of the whole, and what the options make of them."""
