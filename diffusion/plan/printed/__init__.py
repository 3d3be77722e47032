"""What a plan launches, for people: `page` has its lines, `text` and `timeline` show them."""
