"""The gateway's chat page: `mount.mount_pages` puts it on an app, `engine.Models` is what it needs."""
