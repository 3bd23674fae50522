"""Commands of files: models, settings, backups and exports."""
