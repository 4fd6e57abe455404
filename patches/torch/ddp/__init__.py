"""Models under DistributedDataParallel: their communication hook."""
