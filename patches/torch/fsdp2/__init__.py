"""Models under FSDP2: the slots of their groups, filled with encoded collectives."""
