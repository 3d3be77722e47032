"""The look and the behaviour of `report_page`: CSS and JavaScript as text."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2126; --soft: #656d76; --rule: #d8dee4;
  --back: #fff; --set: #f3f6fa; --note: #fff4d6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --soft: #9aa4ae; --rule: #3a424b;
  --back: #14171a; --set: #1e2329; --note: #3b3110; } }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 1.2rem 1.4rem 3rem; }
h1 { font-size: 1.5rem; margin: 0 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--rule);
  padding-bottom: .25rem; }
p { margin: .4rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .7rem; border-bottom: 1px solid var(--rule);
  white-space: nowrap; }
th { font-weight: 600; color: var(--soft); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--back); max-width: 17rem; overflow: hidden; text-overflow: ellipsis; }
.set { background: var(--set); text-align: left; }
i { display: inline-block; width: .7rem; height: .7rem; border-radius: 50%; margin-right: .45rem; }
.note { background: var(--note); padding: .4rem .7rem; border-radius: 4px; }
.bar { display: flex; flex-wrap: wrap; gap: .5rem 1.2rem; align-items: center; margin: .4rem 0; }
.bar label { color: var(--soft); }
select, input, button { font: inherit; color: inherit; }
.legend { gap: .1rem .8rem; }
.legend button { border: 0; background: none; padding: .1rem .3rem; cursor: pointer; }
.legend button.off { opacity: .35; text-decoration: line-through; }
.chart { position: relative; }
.chart svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--rule); }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.raw { fill: none; stroke-width: 1; opacity: .3; }
.cross { stroke: var(--soft); stroke-dasharray: 3 3; }
.tip { position: absolute; pointer-events: none; background: var(--back);
  border: 1px solid var(--rule); border-radius: 4px; padding: .35rem .6rem; font-size: 13px;
  box-shadow: 0 2px 8px #0003; white-space: nowrap; font-variant-numeric: tabular-nums; }
svg.key { display: inline-block; width: 1.5rem; height: .7rem; margin-right: .4rem; }
.tip b { display: block; font-weight: 600; }
.cards { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); }
figure { margin: 0; }
figcaption { overflow-wrap: anywhere; margin-bottom: .2rem; }
figcaption span { color: var(--soft); display: block; }
figure { display: flex; flex-direction: column; justify-content: space-between; }
figure img { width: 100%; max-width: 480px; image-rendering: pixelated;
  border: 1px solid var(--rule); }
input[type=range] { width: min(14rem, 50vw); vertical-align: middle; }
pre { background: var(--set); padding: .7rem; overflow-x: auto; font-size: 12.5px; }
summary { cursor: pointer; padding: .2rem 0; overflow-wrap: anywhere; }
"""

SCRIPT = r"""
'use strict';
const runs = JSON.parse(document.getElementById('data').textContent);
const hidden = new Set();
const NAMES = { held_out: 'held-out loss', loss: 'training loss', grad_norm: 'gradient norm',
  lr: 'learning rate', images_per_s: 'images/s', gpu_gib: 'GPU memory, GiB',
  skipped_steps: 'skipped steps', fid: 'FID', kid: 'KID' };
const nice = name => NAMES[name] || (name.startsWith('sigma_')
  ? 'held-out loss, sigma ' + name.slice(6).replace('_', ' to ') : name.replaceAll('_', ' '));
const short = v => v === 0 ? '0' : Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3
  ? v.toExponential(2).replace('e+', 'e') : String(+v.toPrecision(4));
const tick = v => Math.abs(v) >= 1e6 ? v / 1e6 + 'M' : Math.abs(v) >= 1e4 ? v / 1e3 + 'k'
  : Math.abs(v) < 1e-3 && v ? v.toExponential(0) : String(+v.toPrecision(6));

// the beginning and the end of a long name, which is whole in the table and where one points
const brief = name => name.length > 36 ? `${name.slice(0, 21)}\u2026${name.slice(-14)}` : name;
const dashes = run => run.dash ? { 'stroke-dasharray': `${9 - 2 * run.dash} 4` } : {};

function make(tag, attributes = {}, ...children) {
  const drawn = ['svg', 'path', 'line', 'text', 'circle', 'rect'].includes(tag);
  const node = drawn ? document.createElementNS('http://www.w3.org/2000/svg', tag)
    : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

// the steps of a run as images seen or hours of training
function along(run, steps, axis) {
  if (axis === 'step') return steps;
  const from = run.clock.step, to = run.clock[axis === 'hours' ? 'seconds' : 'images'];
  const scale = axis === 'hours' ? 3600 : 1;
  return steps.map(step => {
    let i = from.findIndex(s => s >= step);
    if (i < 0) i = from.length - 1;
    if (i === 0) return to[0] * step / from[0] / scale;
    const part = Math.min(1, (step - from[i - 1]) / (from[i] - from[i - 1]));
    return (to[i - 1] + part * (to[i] - to[i - 1])) / scale;
  });
}

// how the lines of a run look
const sample = run => make('svg', { class: 'key', viewBox: '0 0 30 14' },
  make('line', { x1: 0, x2: 30, y1: 7, y2: 7, stroke: run.colour, 'stroke-width': 4,
    ...dashes(run) }));

function mean(values, size) {
  const sums = [0];
  for (const v of values) sums.push(sums[sums.length - 1] + v);
  return values.map((_, i) => {
    const from = Math.max(0, i + 1 - size);
    return (sums[i + 1] - sums[from]) / (i + 1 - from);
  });
}

function ticks(low, high, log, most) {
  const found = [];
  if (log) {
    for (const steps of [[1, 2, 5], [1, 3], [1]]) {
      found.length = 0;
      for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
        for (const m of steps) {
          const v = m * 10 ** e;
          if (v >= low * 0.999 && v <= high * 1.001) found.push(+v.toPrecision(3));
        }
      if (found.length <= most) break;
    }
    if (found.length >= 2) return found;
  }
  found.length = 0;
  const rough = (high - low) / most, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(m => m * unit).find(s => s >= rough);
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step)
    found.push(+v.toPrecision(8));
  return found;
}

// lines: [{run, x, y, raw}]; shown: how an x is said
function chart(place, lines, { logX = false, label, shown, at }) {
  place.replaceChildren();
  lines = lines.filter(line => line.x.length);
  if (!lines.length) { place.append(make('p', {}, 'nothing to show')); return; }
  const W = 1000, H = 340, L = 62, R = 14, T = 12, B = 44;
  const all = lines.flatMap(line => line.y), xs = lines.flatMap(line => line.x);
  const logY = Math.min(...all) > 0 && Math.max(...all) > 1.5 * Math.min(...all);
  const fx = logX ? Math.log : v => v, fy = logY ? Math.log : v => v;
  let [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  let [y0, y1] = [Math.min(...all), Math.max(...all)];
  if (x0 === x1) { x0 = logX ? x0 / 2 : x0 - 1; x1 = logX ? x1 * 2 : x1 + 1; }
  if (y0 === y1) { const d = Math.abs(y0) * 0.1 || 1; y0 -= d; y1 += d; }
  const pad = (fy(y1) - fy(y0)) * 0.04;
  const X = v => L + (fx(v) - fx(x0)) / (fx(x1) - fx(x0)) * (W - L - R);
  const Y = v => H - B - (fy(v) - fy(y0) + pad) / (fy(y1) - fy(y0) + 2 * pad) * (H - T - B);
  const svg = make('svg', { viewBox: `0 0 ${W} ${H}`, role: 'img', 'aria-label': label });
  for (const v of ticks(y0, y1, logY, 8)) {
    svg.append(make('line', { class: 'grid', x1: L, x2: W - R, y1: Y(v), y2: Y(v) }));
    svg.append(make('text', { x: L - 8, y: Y(v) + 4, 'text-anchor': 'end' }, tick(v)));
  }
  for (const v of at || ticks(x0, x1, logX, 9)) {
    svg.append(make('line', { class: 'grid', x1: X(v), x2: X(v), y1: H - B, y2: H - B + 5 }));
    svg.append(make('text', { x: X(v), y: H - B + 19, 'text-anchor': 'middle' }, tick(v)));
  }
  svg.append(make('text', { x: (L + W - R) / 2, y: H - 7, 'text-anchor': 'middle' }, label));
  const path = (x, y) => x.map((v, i) =>
    `${i ? 'L' : 'M'}${X(v).toFixed(1)},${Y(y[i]).toFixed(1)}`).join('');
  for (const line of lines) {
    if (line.raw) svg.append(make('path', { class: 'raw', stroke: line.run.colour,
      d: path(line.x, line.raw.map(v => Math.min(y1, Math.max(y0, v)))) }));
    svg.append(make('path', { class: 'line', stroke: line.run.colour, d: path(line.x, line.y),
      ...dashes(line.run) }));
    if (line.x.length < 30) line.x.forEach((v, i) => svg.append(
      make('circle', { cx: X(v), cy: Y(line.y[i]), r: 3, fill: line.run.colour })));
  }
  const cross = make('line', { class: 'cross', y1: T, y2: H - B, visibility: 'hidden' });
  const tip = make('div', { class: 'tip', hidden: '' });
  svg.append(cross);
  const leave = () => { tip.hidden = true; cross.setAttribute('visibility', 'hidden'); };
  svg.addEventListener('pointerleave', leave);
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), px = (event.clientX - box.left) / box.width * W;
    const nearest = line => line.x.reduce((best, v, i) =>
      Math.abs(X(v) - px) < Math.abs(X(line.x[best]) - px) ? i : best, 0);
    const points = lines.map(line => ({ line, i: nearest(line) }));
    const centre = points.reduce((best, p) =>
      Math.abs(X(p.line.x[p.i]) - px) < Math.abs(X(best.line.x[best.i]) - px) ? p : best);
    const x = centre.line.x[centre.i], cx = X(x);
    cross.setAttribute('x1', cx); cross.setAttribute('x2', cx);
    cross.setAttribute('visibility', 'visible');
    tip.replaceChildren(make('b', {}, shown(x)));
    points.sort((a, b) => b.line.y[b.i] - a.line.y[a.i]);
    for (const { line, i } of points) {
      if (px < X(line.x[0]) - 20 || px > X(line.x[line.x.length - 1]) + 20) continue;
      tip.append(make('div', {}, sample(line.run), `${brief(line.run.name)}: ${short(line.y[i])}`));
    }
    tip.hidden = false;
    const left = cx / W * box.width;
    const right = left + 14 + tip.offsetWidth > box.width;
    tip.style.left = `${right ? Math.max(0, left - 14 - tip.offsetWidth) : left + 14}px`;
    tip.style.top = `${Math.max(0, event.clientY - box.top - tip.offsetHeight - 8)}px`;
  });
  place.append(svg, tip);
}

const redraws = [];
const redraw = () => redraws.forEach(draw => draw());

function legend() {
  const bar = make('div', { class: 'bar legend' });
  for (const run of runs) {
    const button = make('button', { type: 'button', title: `show or hide ${run.name}`,
      'data-run': run.name }, sample(run), brief(run.name));
    button.onclick = () => {
      if (!hidden.delete(run.name)) hidden.add(run.name);
      for (const b of document.querySelectorAll('.legend button'))
        b.classList.toggle('off', hidden.has(b.dataset.run));
      redraw();
    };
    bar.append(button);
  }
  return bar;
}
const visible = () => runs.filter(run => !hidden.has(run.name));

function choice(label, options, onchange) {
  const select = make('select');
  for (const [value, text] of options) select.append(make('option', { value }, text));
  select.onchange = onchange;
  return [make('label', {}, label + ' ', select), select];
}

function curves(place) {
  const found = [...new Set(runs.flatMap(run => Object.keys(run.curves)))];
  const constant = name => new Set(runs.flatMap(r => r.curves[name]?.y || [])).size < 2;
  const order = ['held_out', 'loss', ...found.filter(n => n.startsWith('sigma_'))];
  const names = [...new Set([...order.filter(n => found.includes(n)), ...found])]
    .filter(n => ['held_out', 'loss'].includes(n) || !constant(n));
  if (!names.length) { place.append(make('p', {}, 'no run has written a row yet')); return; }
  const [metricLabel, metric] = choice('Curve', names.map(n => [n, nice(n)]), redraw);
  const [axisLabel, axis] = choice('over',
    [['step', 'steps'], ['images', 'images seen'], ['hours', 'hours of training']], redraw);
  const smooth = make('input', { type: 'range', min: 0, max: 20, value: 5 });
  smooth.oninput = redraw;
  const share = make('span');
  const box = make('div', { class: 'chart' });
  place.append(make('div', { class: 'bar' }, metricLabel, axisLabel,
    make('label', {}, 'mean over ', smooth, ' ', share)), legend(), box);
  redraws.push(() => {
    share.textContent = `${smooth.value} % of the rows`;
    const lines = visible().filter(run => run.curves[metric.value]).map(run => {
      const { x, y } = run.curves[metric.value];
      const size = Math.max(1, Math.round(y.length * smooth.value / 100));
      return { run, x: along(run, x, axis.value),
        y: mean(y, size), raw: size > 1 ? y : null };
    });
    const unit = { step: 'step', images: 'images', hours: 'hours' }[axis.value];
    const shown = v => axis.value === 'hours' ? `${short(v)} hours`
      : `${unit} ${Math.round(v).toLocaleString('en')}`;
    chart(box, lines, { label: `${nice(metric.value)} over ${unit}`, shown });
  });
}

function bands(place) {
  const box = make('div', { class: 'chart' });
  place.append(make('p', {}, 'The unit is the same for every run: 1 is the best guess that knows '
    + 'nothing of the data but a deviation of 0.5. Small sigma is about details, large '
    + 'sigma about composition.'), box);
  const edges = name => name.slice(6).split('_').map(Number);
  redraws.push(() => {
    const names = {};
    const lines = visible().map(run => {
      const line = { run, x: [], y: [] };
      for (const [name, curve] of Object.entries(run.curves)) {
        if (!name.startsWith('sigma_')) continue;
        const [low, high] = edges(name), x = Math.sqrt(low * high);
        names[x] = `sigma ${low} to ${high}`;
        line.x.push(x); line.y.push(curve.y[curve.y.length - 1]);
      }
      return line;
    });
    chart(box, lines, { logX: true, label: 'loss over sigma', shown: x => names[x],
      at: [0.05, 0.15, 0.4, 1.2, 3.5, 10].filter(v => lines.some(l =>
        v > Math.min(...l.x) && v < Math.max(...l.x))) });
  });
}

function samples(place) {
  const all = runs.flatMap(run => run.frames.map(frame => frame.step));
  const steps = [...new Set(all)].sort((a, b) => a - b);
  const slider = make('input', { type: 'range', min: 0, max: steps.length - 1,
    value: steps.length - 1 });
  const said = make('b'), cards = make('div', { class: 'cards' });
  slider.oninput = redraw;
  place.append(make('div', { class: 'bar' }, make('label', {}, 'Step ', slider), said), cards);
  redraws.push(() => {
    const step = steps[slider.value];
    said.textContent = step.toLocaleString('en');
    cards.replaceChildren();
    for (const run of visible()) {
      const frame = run.frames.filter(f => f.step <= step).pop();
      if (!frame) continue;
      cards.append(make('figure', {}, make('figcaption', {}, sample(run), brief(run.name),
        make('span', {}, `step ${frame.step.toLocaleString('en')}`)),
        make('img', { src: frame.source, alt: `samples of ${run.name} at step ${frame.step}` })));
    }
  });
}

for (const [name, fill] of Object.entries({ curves, bands, samples })) {
  const place = document.getElementById(name);
  if (place) fill(place);
}
redraw();
"""
