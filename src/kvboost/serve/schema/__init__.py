"""What clients may send and what they get: pydantic's models, and the checks of fields."""
