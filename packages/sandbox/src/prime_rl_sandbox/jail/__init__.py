"""Jails: bubblewrap with a fork server inside (`jail_server`, `jail_supervisor`, `jail_child`), and their host side."""
