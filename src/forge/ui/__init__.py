"""The web UI: every run of a folder in a browser, live, read from the runs' own files.

    async with serve_ui(UiOptions(runs_dir=Path("runs"))) as ui:
        print(ui.url)

It writes nothing into a run's folder and asks no process of the run, so it shows runs of other machines over a shared
folder, and runs that were killed. `forge ui` is the command. Importing it loads no torch.
"""
