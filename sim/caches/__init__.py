"""Ways to share KV between requests, one file each."""
