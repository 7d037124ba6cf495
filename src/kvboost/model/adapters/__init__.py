"""LoRA adapters: reading their files, and adding what they change to the rows of a forward."""
