"""Small tools for every package: text, files, and frames on sockets. Only the standard library is used."""
