"""How the processes of a mesh find, hear and lose one another, on one host or on several."""
