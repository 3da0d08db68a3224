"""A worker on a card: rows from the page cache to card memory, kernels on the packed codes. No torch."""
