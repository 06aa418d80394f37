"""Draw the reward curve of a model card."""

import io

Points = list[tuple[int, float]]  # (step, value)

BLUE, LIGHT_BLUE, ORANGE = "#2563eb", "#bfd3fb", "#ea580c"
MAX_TITLE_LENGTH = 48  # characters; a longer title would run into the legend
MIN_POINTS_TO_SMOOTH = 60


def draw_curve(title: str, rewards: Points, accuracies: Points) -> bytes:
    """Return a PNG that shows rewards as a line over the steps and held-out accuracies as dots."""
    # Imported here because it takes half a second. Not pyplot: it keeps global state and looks for a display.
    import matplotlib.style
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with matplotlib.style.context("default"):  # a user's matplotlibrc may ask for LaTeX or another size
        figure = Figure(figsize=(9, 4.5), dpi=100, layout="constrained")
        axes = figure.add_subplot()
        if len(rewards) >= MIN_POINTS_TO_SMOOTH:
            axes.plot(*zip(*rewards), color=LIGHT_BLUE, linewidth=1)
            axes.plot(*zip(*moving_mean(rewards)), color=BLUE, linewidth=2, label="mean reward, smoothed")
        elif rewards:
            marker = "o" if len(rewards) <= MIN_POINTS_TO_SMOOTH // 2 else ""
            axes.plot(*zip(*rewards), color=BLUE, linewidth=2, marker=marker, markersize=5, label="mean reward")
        if accuracies:
            axes.plot(*zip(*accuracies), color=ORANGE, linewidth=1, marker="o", label="held-out accuracy")
        title = title if len(title) <= MAX_TITLE_LENGTH else f"{title[: MAX_TITLE_LENGTH - 3]}..."
        axes.set_title(title, loc="left", parse_math=False)  # a run's name may contain $
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
        axes.set(xlabel="step", ylabel=" and ".join(["reward"] * bool(rewards) + ["accuracy"] * bool(accuracies)))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", alpha=0.4)
        axes.spines[["top", "right"]].set_visible(False)
        file = io.BytesIO()
        figure.savefig(file, format="png")
    return file.getvalue()


def moving_mean(points: Points) -> Points:
    """Smooth the values by a moving mean. A window has about 5 % of the points, and fewer at both ends."""
    half = max(2, len(points) // 40)
    values = [value for _, value in points]
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [(step, sum(window) / len(window)) for (step, _), window in zip(points, windows)]
