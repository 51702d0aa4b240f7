"""From a request's fields to the tokens, or failing that the bytes, of its prompt."""
