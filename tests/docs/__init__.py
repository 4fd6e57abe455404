"""The documents: examples parse, what they name exists, what is made from the code is current."""
