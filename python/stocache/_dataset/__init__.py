"""The parts of CachedDataset."""
