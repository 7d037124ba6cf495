"""Runs rows through a loaded model: forwards, attention, the KV of requests, sampling."""
