"""Small tools for every package, with nothing but the standard library: text, files, and frames on sockets."""
