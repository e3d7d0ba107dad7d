//! What a search found, as one page: no scripts, no external resources.

use super::chart::{
    AxisLabels, BarGroup, HeatRow, LineSeries, ScatterPoint, bars, escape, heat_map, lines,
    mark_front, scatter,
};
use super::report::Verdict;
use super::{CandidateRuns, RoundKind, TuneCandidate, TuneRun, Tuner, millis};

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:46em;margin:2em auto;\
    padding:0 1em;color:#222;background:#fff}h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}\
    table{border-collapse:collapse;width:100%;font-size:.9em}td,th{padding:.25em .5em;\
    text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}\
    code{background:#f2f2f2;padding:.15em .35em;border-radius:3px}svg{width:100%;height:auto}\
    svg text{font:11px system-ui,sans-serif;fill:#333}.grid{stroke:#ddd}.on{fill:#0b61a4}\
    .off{fill:#bbb}.front{fill:none;stroke:#0b61a4;stroke-dasharray:4 3}polyline.one{fill:none;\
    stroke:#0b61a4;stroke-width:2}polyline.other{fill:none;stroke:#d9822b;stroke-width:2}\
    rect.one{fill:#0b61a4}rect.other{fill:#d9822b}.better{fill:#1a9850}.worse{fill:#d73027}\
    .key b{display:inline-block;width:.8em;height:.8em;margin-right:.3em}\
    .key span{margin-right:1.5em}.one b{background:#0b61a4}.other b{background:#d9822b}\
    @media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}svg text{fill:#ccc}\
    .grid,td,th{stroke:#444;border-color:#444}code{background:#2a2a2a}}";

impl Tuner<'_> {
    /// The page with all charts.
    #[must_use]
    pub fn page(&self) -> String {
        let mut page = String::from(
            "<!DOCTYPE html><html lang=\"en\"><head><meta charset=\"utf-8\">\
             <meta name=\"viewport\" content=\"width=device-width\">",
        );
        put!(
            page,
            "<title>warmroute-router tune</title><style>{STYLE}</style></head><body>"
        );
        put!(
            page,
            "<h1>warmroute-router tune</h1><p>{}</p>",
            escape(&self.setting())
        );
        if let Some(verdict) = self.verdict() {
            let flags = self.advised_flags(&verdict);
            put!(
                page,
                "<p><strong>{}</strong></p>",
                escape(&verdict.sentence(self.goal))
            );
            put!(page, "<p>Use: <code>{}</code></p>", escape(&flags));
            self.table_of_finalists(&mut page);
            self.pareto(&mut page);
            self.heat(&mut page);
            over_time(&mut page, &verdict);
            balance(&mut page, &verdict);
        }
        page.push_str("</body></html>\n");
        page
    }

    fn table_of_finalists(&self, page: &mut String) {
        let Some(last) = self.round(RoundKind::Final) else {
            return;
        };
        page.push_str(
            "<h2>Finalists</h2><table><tr><th>candidate</th><th>TTFT ms</th><th>p99 ms</th>\
             <th>ITL ms</th><th>end to end ms</th><th>hit rate</th><th>against the best</th></tr>",
        );
        for (candidate, [ttft, p99, itl, e2e, hits], against) in self.rows(last) {
            let name = escape(&candidate.label());
            put!(
                page,
                "<tr><td>{name}</td><td>{ttft:.1}</td><td>{p99:.0}</td><td>{itl:.2}</td>"
            );
            put!(
                page,
                "<td>{e2e:.0}</td><td>{hits:.3}</td><td>{}</td></tr>",
                escape(&against)
            );
        }
        put!(
            page,
            "</table><p>Means over {} seeds. Differences of the goal are geometric means of pairs \
             of runs with equal arrivals, with 95 % confidence intervals.</p>",
            self.seeds
        );
    }

    /// The front of all candidates of the first round.
    fn pareto(&self, page: &mut String) {
        let Some(screen) = self.round(RoundKind::Screen) else {
            return;
        };
        let point = |runs: &CandidateRuns| ScatterPoint {
            name: runs.candidate.label(),
            x: runs.mean(|figures| figures.itl_mean_ms),
            y: runs.mean(|figures| figures.ttft_mean_ms),
            is_front: false,
        };
        let mut points: Vec<ScatterPoint> = screen.ranking.iter().map(point).collect();
        mark_front(&mut points);
        let labels = AxisLabels {
            x: "mean inter-token latency, ms",
            y: "mean time to first token, ms",
        };
        put!(
            page,
            "<h2>Time to first token against inter-token latency</h2>"
        );
        page.push_str(&scatter(&points, &labels));
        page.push_str(
            "<p>All candidates, in the first round. No candidate is better in both \
             values than those on the line.</p>",
        );
    }

    /// The goal of `kv` over that of the default, by weight and temperature, in the first round.
    fn heat(&self, page: &mut String) {
        let round = self.round(RoundKind::Screen);
        let Some((screen, default)) =
            round.and_then(|round| Some((round, round.of(TuneCandidate::DEFAULT)?)))
        else {
            return;
        };
        let ratio = |weight, temperature| {
            let runs = screen.of(TuneCandidate::kv(weight, temperature))?;
            Some((runs.mean_log(self.goal) - default.mean_log(self.goal)).exp())
        };
        let rows: Vec<HeatRow> = TuneCandidate::TEMPERATURES
            .into_iter()
            .map(|temperature| HeatRow {
                name: temperature.to_string(),
                cells: TuneCandidate::WEIGHTS
                    .map(|weight| ratio(weight, temperature))
                    .into(),
            })
            .collect();
        let columns = TuneCandidate::WEIGHTS.map(|weight| weight.to_string());
        let labels = AxisLabels {
            x: "overlap score weight",
            y: "router temperature",
        };
        put!(
            page,
            "<h2>Policy kv against the default: {}</h2>",
            self.goal.label()
        );
        page.push_str(&heat_map(&columns, &rows, &labels));
        page.push_str("<p>Ratios in the first round; below 1 is better than the default.</p>");
    }
}

/// The winner and the default, or the default alone.
fn compared<'v>(verdict: &'v Verdict<'_>) -> Vec<(&'static str, &'v CandidateRuns, &'v TuneRun)> {
    let mut sides = vec![("one", verdict.winner)];
    if verdict.winner.candidate != verdict.default.candidate {
        sides.push(("other", verdict.default));
    }
    let first =
        |(class, runs): (&'static str, &'v CandidateRuns)| Some((class, runs, runs.runs.first()?));
    sides.into_iter().filter_map(first).collect()
}

fn key(page: &mut String, sides: &[(&'static str, &CandidateRuns, &TuneRun)]) {
    page.push_str("<p class=\"key\">");
    for (class, runs, _) in sides {
        let name = escape(&runs.candidate.label());
        put!(page, "<span class=\"{class}\"><b></b>{name}</span>");
    }
    page.push_str("</p>");
}

fn over_time(page: &mut String, verdict: &Verdict<'_>) {
    let sides = compared(verdict);
    let series = |value: fn(&super::TimeSlot) -> Option<f64>| -> Vec<LineSeries> {
        let line = |(class, runs, run): &(&'static str, &CandidateRuns, &TuneRun)| LineSeries {
            name: runs.candidate.label(),
            class,
            points: run
                .slots
                .iter()
                .map(|slot| (slot.start.as_secs_f64() / 60.0, value(slot)))
                .collect(),
        };
        sides.iter().map(line).collect()
    };
    page.push_str("<h2>Over time</h2>");
    key(page, &sides);
    let labels = |y| AxisLabels {
        x: "minutes of the simulated run",
        y,
    };
    let ttft = series(|slot| slot.ttft_mean.map(millis));
    page.push_str(&lines(&ttft, &labels("mean time to first token, ms")));
    let hits = series(|slot| slot.hit_rate);
    page.push_str(&lines(&hits, &labels("hit rate")));
    page.push_str("<p>One seed, by time of arrival.</p>");
}

fn balance(page: &mut String, verdict: &Verdict<'_>) {
    let sides = compared(verdict);
    let share = |run: &TuneRun, worker: usize| {
        let all: u64 = run.worker_tokens.iter().sum();
        let mean = all as f64 / run.worker_tokens.len().max(1) as f64;
        run.worker_tokens
            .get(worker)
            .map_or(0.0, |&tokens| tokens as f64 / mean.max(1.0))
    };
    let workers = sides
        .iter()
        .map(|(_, _, run)| run.worker_tokens.len())
        .max();
    let groups: Vec<BarGroup> = (0..workers.unwrap_or_default())
        .map(|worker| BarGroup {
            name: worker.to_string(),
            values: sides.iter().map(|(_, _, run)| share(run, worker)).collect(),
        })
        .collect();
    let classes: Vec<&str> = sides.iter().map(|(class, _, _)| *class).collect();
    let labels = AxisLabels {
        x: "worker",
        y: "computed tokens over the mean",
    };
    page.push_str("<h2>Load of the workers</h2>");
    key(page, &sides);
    page.push_str(&bars(&groups, &classes, &labels));
}
