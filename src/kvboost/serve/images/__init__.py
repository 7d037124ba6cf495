"""Images that requests name by address: which may be fetched, and how."""
