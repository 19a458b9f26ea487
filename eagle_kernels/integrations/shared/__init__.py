"""What the plug-ins for servers share: hooks, parts, what is relied on, and reports. It imports no server."""
