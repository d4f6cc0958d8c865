"""Plots of lines as SVG, and tables in Markdown, for the scripts that write figures."""

# each name has one color in all plots
COLORS = {"none": "#888888", "published": "#c0562b", "hadal": "#2b6cc0", "flow": "#2b9a5b"}
OTHERS = ["#2b6cc0", "#c0562b", "#2b9a5b", "#8a4fbf"]


def plot(title, xlabel, ylabel, x, lines, low=0.0, high=1.0):
    """An SVG of lines {name: values} over x, with a mark at each value if there are few."""
    width, height, left, top, right, bottom = 640, 320, 56, 36, 96, 44
    w, h = width - left - right, height - top - bottom

    def at(i, v):
        return f"{left + w * (x[i] - x[0]) / (x[-1] - x[0]):.1f},{top + h * (high - min(max(v, low), high)) / (high - low):.1f}"

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">']
    out.append(f'<rect width="{width}" height="{height}" fill="white"/><text x="{left}" y="20" font-size="14">{title}</text>')
    for k in range(6):
        v, y = low + (high - low) * k / 5, top + h * (5 - k) / 5
        out.append(f'<path d="M{left} {y:.1f}h{w}" stroke="#dddddd"/><text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{v:.2f}</text>')
    ticks = x if len(x) <= 8 else [x[0] + (x[-1] - x[0]) * k // 6 for k in range(7)]
    for v in ticks:
        out.append(f'<text x="{left + w * (v - x[0]) / (x[-1] - x[0]):.1f}" y="{top + h + 16}" text-anchor="middle">{v}</text>')
    out.append(f'<text x="{left + w / 2}" y="{height - 8}" text-anchor="middle">{xlabel}</text>')
    out.append(f'<text transform="translate(14 {top + h / 2}) rotate(-90)" text-anchor="middle">{ylabel}</text>')
    for k, (name, values) in enumerate(lines.items()):
        points = [at(i, v) for i, v in enumerate(values)]
        color = COLORS.get(name) or OTHERS[k % len(OTHERS)]
        out.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" stroke-width="2"/>')
        if len(x) <= 8:
            out += [f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3" fill="{color}"/>' for p in points]
        y = top + 14 + 18 * k
        out.append(f'<path d="M{width - right + 12} {y - 4}h16" stroke="{color}" stroke-width="2"/><text x="{width - right + 34}" y="{y}">{name}</text>')
    return "\n".join(out) + "\n</svg>\n"


def table(head, rows):
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines) + "\n"
