"""The endpoints of OpenAI's API and of KVBoost's own."""
