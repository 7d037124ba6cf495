"""Weights of 4 and 8 bits, kept so: what files hold, and the layers that multiply with them."""
