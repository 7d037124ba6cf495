"""The model and everything around it. The only room that imports transformers."""
