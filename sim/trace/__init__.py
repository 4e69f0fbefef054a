"""What `prefixsim trace` does: describe a trace, convert it, fetch a public one."""
