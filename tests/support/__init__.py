"""What several tests share: tiny models, fake servers and engines, checks."""
