"""What ``stocache.DataLoader`` is made of: where samples are, and who makes batches of them."""
