"""The model and everything around it. The only package that imports transformers."""

from kvboost.model.deferred import install

install()
