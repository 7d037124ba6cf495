"""The model and everything around it. The only package that imports transformers."""

from kvboost.model.loading.deferred import install

install()
