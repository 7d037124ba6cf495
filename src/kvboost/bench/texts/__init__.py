"""Prompts and questions, made from text that every Python has."""
