"""How one policy is trained by one process or several: torch (alone, DDP, FSDP2) and DeepSpeed (ZeRO)."""
