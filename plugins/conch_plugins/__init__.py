"""The built-in plugins, offered through the same door as anyone's."""
