"""Which rank keeps and visits which samples of a dataset: the parts of ``LazyShardDataset``."""
