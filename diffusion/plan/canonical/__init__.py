"""One form for each computation: rewrites behind the trace, of norms written by hand and more."""
