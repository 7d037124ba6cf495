"""Loading a model: its files and weights, its tokenizer, and what its architecture allows."""
