"""Backend `prime`: jails in remote machines of Prime Intellect, over the client library `prime-sandboxes`."""
