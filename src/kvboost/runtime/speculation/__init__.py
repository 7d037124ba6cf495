"""Speculation: tokens that probably follow are drafted and checked together, in one forward."""
