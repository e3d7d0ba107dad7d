//! Charts as inline SVG, without scripts or external resources.

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 45.0;

/// Marks of an axis.
const TICKS: usize = 5;

pub(super) struct AxisLabels<'a> {
    pub(super) x: &'a str,
    pub(super) y: &'a str,
}

/// A named point; those on the front are filled and labelled.
pub(super) struct ScatterPoint {
    pub(super) name: String,
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) is_front: bool,
}

/// A named series over time; `None` where there is no value.
pub(super) struct LineSeries {
    pub(super) name: String,
    pub(super) class: &'static str,
    pub(super) points: Vec<(f64, Option<f64>)>,
}

/// Bars of one group, one for each of the chart's series.
pub(super) struct BarGroup {
    pub(super) name: String,
    pub(super) values: Vec<f64>,
}

/// A cell's value and its text; `None`: no value.
pub(super) struct HeatRow {
    pub(super) name: String,
    pub(super) cells: Vec<Option<f64>>,
}

/// Escapes text for HTML and SVG.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            letter => escaped.push(letter),
        }
    }
    escaped
}

/// Marks the points that no other one beats in both values.
pub(super) fn mark_front(points: &mut [ScatterPoint]) {
    let values: Vec<(f64, f64)> = points.iter().map(|point| (point.x, point.y)).collect();
    for point in points {
        let beats =
            |&(x, y): &(f64, f64)| x <= point.x && y <= point.y && (x < point.x || y < point.y);
        point.is_front = !values.iter().any(beats);
    }
}

/// Range of an axis, with room around the values.
#[derive(Clone, Copy)]
struct AxisRange {
    low: f64,
    high: f64,
}

impl AxisRange {
    fn around(values: impl Iterator<Item = f64>) -> Self {
        let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| {
            (low.min(value), high.max(value))
        });
        if !low.is_finite() || !high.is_finite() {
            return Self {
                low: 0.0,
                high: 1.0,
            };
        }
        let room = ((high - low) * 0.08).max(high.abs() * 0.01).max(1e-9);
        Self {
            low: (low - room).max(low.min(0.0)),
            high: high + room,
        }
    }

    fn from_zero(values: impl Iterator<Item = f64>) -> Self {
        Self::around(values.chain([0.0]))
    }

    fn share(self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    fn ticks(self) -> impl Iterator<Item = f64> {
        let step = (self.high - self.low) / TICKS as f64;
        (0..=TICKS).map(move |tick| self.low + step * tick as f64)
    }
}

fn x_at(axis: AxisRange, value: f64) -> f64 {
    LEFT + axis.share(value) * (WIDTH - LEFT - RIGHT)
}

fn y_at(axis: AxisRange, value: f64) -> f64 {
    HEIGHT - BOTTOM - axis.share(value) * (HEIGHT - TOP - BOTTOM)
}

fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn open(height: f64) -> String {
    format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">")
}

fn text(svg: &mut String, place: (f64, f64), anchor: &str, text: &str) {
    let (x, y) = place;
    let text = escape(text);
    put!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"
    );
}

fn y_axis(svg: &mut String, axis: AxisRange, label: &str) {
    for tick in axis.ticks() {
        let y = y_at(axis, tick);
        put!(
            svg,
            "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{}\"/>",
            WIDTH - RIGHT
        );
        text(svg, (LEFT - 6.0, y + 4.0), "end", &number(tick));
    }
    text(svg, (4.0, TOP - 7.0), "start", label);
}

fn x_axis(svg: &mut String, axis: AxisRange, label: &str) {
    for tick in axis.ticks() {
        text(
            svg,
            (x_at(axis, tick), HEIGHT - BOTTOM + 16.0),
            "middle",
            &number(tick),
        );
    }
    text(svg, (WIDTH / 2.0, HEIGHT - 6.0), "middle", label);
}

pub(super) fn scatter(points: &[ScatterPoint], labels: &AxisLabels<'_>) -> String {
    let x = AxisRange::around(points.iter().map(|point| point.x));
    let y = AxisRange::around(points.iter().map(|point| point.y));
    let mut svg = open(HEIGHT);
    y_axis(&mut svg, y, labels.y);
    x_axis(&mut svg, x, labels.x);
    let mut front: Vec<&ScatterPoint> = points.iter().filter(|point| point.is_front).collect();
    front.sort_by(|one, other| one.x.total_cmp(&other.x));
    let line: Vec<String> = front
        .iter()
        .map(|point| format!("{:.1},{:.1}", x_at(x, point.x), y_at(y, point.y)))
        .collect();
    put!(
        svg,
        "<polyline class=\"front\" points=\"{}\"/>",
        line.join(" ")
    );
    for point in points {
        let (at_x, at_y) = (x_at(x, point.x), y_at(y, point.y));
        let class = if point.is_front { "on" } else { "off" };
        let name = escape(&point.name);
        let values = format!("{} / {}", number(point.x), number(point.y));
        put!(
            svg,
            "<circle class=\"{class}\" cx=\"{at_x:.1}\" cy=\"{at_y:.1}\" r=\"4\">\
             <title>{name}: {values}</title></circle>"
        );
        if point.is_front {
            let is_right = at_x > WIDTH * 0.7;
            let (shift, anchor) = if is_right {
                (-7.0, "end")
            } else {
                (7.0, "start")
            };
            text(&mut svg, (at_x + shift, at_y - 5.0), anchor, &point.name);
        }
    }
    svg + "</svg>"
}

pub(super) fn lines(series: &[LineSeries], labels: &AxisLabels<'_>) -> String {
    let points = || series.iter().flat_map(|line| &line.points);
    let x = AxisRange::around(points().map(|(at, _)| *at));
    let y = AxisRange::from_zero(points().filter_map(|(_, value)| *value));
    let mut svg = open(HEIGHT);
    y_axis(&mut svg, y, labels.y);
    x_axis(&mut svg, x, labels.x);
    for line in series {
        let drawn = line.points.iter().filter_map(|(at, value)| {
            let value = (*value)?;
            Some(format!("{:.1},{:.1}", x_at(x, *at), y_at(y, value)))
        });
        let drawn: Vec<String> = drawn.collect();
        let (name, class) = (escape(&line.name), line.class);
        put!(
            svg,
            "<polyline class=\"{class}\" points=\"{}\"><title>{name}</title></polyline>",
            drawn.join(" ")
        );
    }
    svg + "</svg>"
}

pub(super) fn bars(groups: &[BarGroup], classes: &[&str], labels: &AxisLabels<'_>) -> String {
    let values = groups.iter().flat_map(|group| group.values.iter().copied());
    let y = AxisRange::from_zero(values);
    let mut svg = open(HEIGHT);
    y_axis(&mut svg, y, labels.y);
    text(&mut svg, (WIDTH / 2.0, HEIGHT - 6.0), "middle", labels.x);
    let room = (WIDTH - LEFT - RIGHT) / groups.len().max(1) as f64;
    let width = room * 0.8 / classes.len().max(1) as f64;
    let is_labelled = groups.len() <= 32;
    for (place, group) in groups.iter().enumerate() {
        let start = LEFT + room * (place as f64 + 0.1);
        for (number_of, (value, class)) in group.values.iter().zip(classes).enumerate() {
            let (x, top, base) = (
                start + width * number_of as f64,
                y_at(y, *value),
                y_at(y, 0.0),
            );
            let name = escape(&group.name);
            put!(
                svg,
                "<rect class=\"{class}\" x=\"{x:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" \
                 height=\"{:.1}\"><title>{name}: {}</title></rect>",
                (base - top).max(0.0),
                number(*value)
            );
        }
        if is_labelled {
            let middle = start + room * 0.4;
            text(
                &mut svg,
                (middle, HEIGHT - BOTTOM + 16.0),
                "middle",
                &group.name,
            );
        }
    }
    svg + "</svg>"
}

/// Cells are ratios: green below 1, red above. The colour is full at half and at twice.
pub(super) fn heat_map(columns: &[String], rows: &[HeatRow], labels: &AxisLabels<'_>) -> String {
    let (cell_width, cell_height) = ((WIDTH - LEFT - RIGHT) / columns.len().max(1) as f64, 40.0);
    let height = TOP + BOTTOM + cell_height * rows.len() as f64;
    let mut svg = open(height);
    text(&mut svg, (4.0, TOP - 7.0), "start", labels.y);
    text(&mut svg, (WIDTH / 2.0, height - 6.0), "middle", labels.x);
    for (place, column) in columns.iter().enumerate() {
        let x = LEFT + cell_width * (place as f64 + 0.5);
        text(&mut svg, (x, height - BOTTOM + 16.0), "middle", column);
    }
    for (place, row) in rows.iter().enumerate() {
        let y = TOP + cell_height * place as f64;
        text(
            &mut svg,
            (LEFT - 6.0, y + cell_height / 2.0 + 4.0),
            "end",
            &row.name,
        );
        for (column, cell) in row.cells.iter().enumerate() {
            let Some(ratio) = cell else { continue };
            let x = LEFT + cell_width * column as f64;
            let strength = (ratio.max(1e-9).log2().abs()).min(1.0) * 0.75;
            let class = if *ratio <= 1.0 { "better" } else { "worse" };
            put!(
                svg,
                "<rect class=\"{class}\" fill-opacity=\"{strength:.2}\" x=\"{x:.1}\" y=\"{y:.1}\" \
                 width=\"{:.1}\" height=\"{:.1}\"/>",
                cell_width - 2.0,
                cell_height - 2.0
            );
            let middle = (x + cell_width / 2.0, y + cell_height / 2.0 + 4.0);
            text(&mut svg, middle, "middle", &format!("{ratio:.2}"));
        }
    }
    svg + "</svg>"
}
