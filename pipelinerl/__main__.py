"""``python -m pipelinerl``: the command line, where its script is not on the path."""

from pipelinerl.cli import main

if __name__ == "__main__":
    main()
