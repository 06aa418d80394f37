"""A report of one or several runs, as one HTML file or as Markdown with PNGs. tools/report.py is the program.

    read.py      what a run's folder has: rows, events, the record, responses of evaluations
    summary.py   what is kept of the rows, which are read one by one
    series.py    curves of metrics: smoothing, and thinning of long runs; sums for bars
    charts.py    charts of curves, times, events and evaluations, as Vega-Lite specifications by altair
    responses.py responses to the same prompts, early and late in training
    build.py     the page: its sections, with tables and texts
    parts.py     the parts of a page, without any format
    html.py      a page as one HTML file, with the script that draws the charts; style.css and draw.js are parts of it
    markdown.py  a page as Markdown, and its charts as PNGs

Nothing here imports torch, so that a report starts fast.
"""
