"""The model and everything around it. The only room that imports transformers."""

from kvboost.model.deferred import install

install()
