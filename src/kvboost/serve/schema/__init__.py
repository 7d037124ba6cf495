"""The bodies of requests and answers: pydantic's models, and the checks of fields."""
