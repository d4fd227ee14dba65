'use strict';
const byId = id => document.getElementById(id);
const SVG = 'http://www.w3.org/2000/svg';
const make = (name, attributes = {}, ...inner) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...inner);
  return element;
};
const draw = (name, attributes = {}, text = '') => {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;
  return element;
};
const number = value => value === null || value === undefined ? '-'
  : Math.abs(value) >= 100 ? Math.round(value).toLocaleString() : value.toLocaleString(undefined, {maximumFractionDigits: 1});
const share = value => value === null || value === undefined ? '-' : `${(100 * value).toFixed(0)} %`;
const age = seconds => seconds === null || seconds === undefined ? '-' : seconds < 120 ? `${Math.round(seconds)} s`
  : seconds < 7200 ? `${Math.round(seconds / 60)} min` : seconds < 172800 ? `${Math.round(seconds / 3600)} h`
  : `${Math.round(seconds / 86400)} days`;
const SOURCES = {device: [0, 'device'], host: [2, 'host memory'], none: [1, 'not cached']};

let key = '', slot = '', titles = {};

async function ask(path, body) {
  const headers = body === undefined ? {} : {'content-type': 'application/json'};
  if (key) headers.authorization = `Bearer ${key}`;
  return fetch(path, {headers, ...(body === undefined ? {} : {method: 'POST', body})});
}

// Charts over time.

function chart(title, columns, series, format, top) {
  const [width, height, left, base] = [360, 150, 44, 126];
  const times = columns.at_s || [], last = times.length - 1;
  const values = series.flatMap(one => columns[one.field] || []).filter(value => value !== null);
  const most = top || Math.max(1e-9, ...values) * 1.1;
  const shown = [60, 120, 300, 600].find(span => span >= times[last] - times[0]) || 600;
  const x = index => left + (width - left - 8) * (1 - (times[last] - times[index]) / shown);
  const y = value => base - (base - 10) * Math.min(1, value / most);
  const now = series.map(one => `${one.name} ${format((columns[one.field] || [])[last])}`).join(', ');
  const picture = draw('svg', {viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': `${title}: ${now}`});
  for (const part of [0, 0.5, 1]) {
    picture.append(draw('line', {class: 'rule', x1: left, x2: width - 8, y1: y(part * most), y2: y(part * most)}));
    picture.append(draw('text', {x: left - 4, y: y(part * most) + 4, 'text-anchor': 'end'}, format(part * most)));
  }
  for (const part of [1, 0.5, 0]) {
    const position = left + (width - left - 8) * (1 - part), anchor = part === 1 ? 'start' : part ? 'middle' : 'end';
    picture.append(draw('text', {x: position, y: height - 6, 'text-anchor': anchor}, part ? `-${age(part * shown)}` : 'now'));
  }
  for (const one of series) {
    let line = [];
    const flush = () => {
      if (line.length) picture.append(draw('polyline', {class: `s${one.color}`, points: line.join(' ')}));
      line = [];
    };
    (columns[one.field] || []).forEach((value, index) => {
      if (value === null) flush(); else line.push(`${x(index).toFixed(1)},${y(value).toFixed(1)}`);
    });
    flush();
  }
  markSwaps(picture, columns, x, base);
  const legend = make('p', {class: 'legend'});
  for (const one of series) {
    const last_value = format((columns[one.field] || [])[last]);
    legend.append(make('span', {}, make('i', {class: `swatch b${one.color}`}), `${one.name} ${last_value}`));
  }
  return make('figure', {}, make('figcaption', {}, title), picture, legend);
}

function markSwaps(picture, columns, x, base) {
  const versions = columns.versions || [];
  versions.forEach((version, index) => {
    if (index && version !== versions[index - 1]) {
      const line = draw('line', {class: 's3', 'stroke-dasharray': '2 3', x1: x(index), x2: x(index), y1: 6, y2: base});
      line.append(draw('title', {}, `model version ${version}`));
      picture.append(line);
    }
  });
}

function withShares(columns) {
  const of = ['device', 'host', 'none'].map(name => columns[`from_${name}`] || []);
  const sums = (columns.at_s || []).map((_, i) => of[0][i] + of[1][i] + of[2][i]);
  const part = rows => sums.map((sum, i) => sum ? rows.reduce((total, row) => total + row[i], 0) / sum : null);
  return {...columns, hits: part([of[0], of[1]]), hits_device: part([of[0]])};
}

function showCharts(columns) {
  const all = withShares(columns);
  byId('charts').replaceChildren(
    chart('Requests per second', all, [{name: 'ok', field: 'ok', color: 0},
      {name: 'shed', field: 'shed', color: 1}, {name: 'failed', field: 'failed', color: 5}], number),
    chart('Latency, ms', all, [{name: 'P50', field: 'p50_ms', color: 2},
      {name: 'P99', field: 'p99_ms', color: 3}], number),
    chart('Prefix cache hits', all, [{name: 'device and host', field: 'hits', color: 0},
      {name: 'device', field: 'hits_device', color: 2}], share, 1),
    chart('Utilization', all, [{name: 'device busy', field: 'device_busy', color: 1},
      {name: 'device cache', field: 'device_cache', color: 0}, {name: 'host cache', field: 'host_cache', color: 2}],
      share, 1),
    chart('Queued work, ms', all, [{name: 'queued', field: 'queued_ms', color: 4}], number),
    chart('Model age', all, [{name: 'since export', field: 'age_s', color: 3}], age));
}

// Latest requests.

function showRelay(relay) {
  const all = Object.entries(relay).flatMap(([role, each]) => each.map(one => ({...one, role})));
  const shown = all.sort((a, b) => a.arrived_s - b.arrived_s).slice(-28);
  if (!shown.length) {
    byId('relay').replaceChildren(make('p', {class: 'quiet'}, 'no requests yet'));
    return;
  }
  const [left, width, step] = [150, 900, 15];
  const first = shown[0].arrived_s, end = Math.max(...shown.map(one => one.ended_s));
  // Gaps between requests are long compared with the requests, so they are compressed.
  const spans = compressed(shown, first, end);
  const x = seconds => left + (width - left - 60) * spans(seconds);
  const height = shown.length * step + 26;
  const picture = draw('svg', {viewBox: `0 0 ${width} ${height}`, role: 'img',
    'aria-label': `the latest ${shown.length} requests`});
  const rows = new Map(shown.map((one, row) => [`${one.role} ${one.number}`, row]));
  shown.forEach((one, row) => {
    const [color, words] = SOURCES[one.cache_source];
    const y = 4 + row * step, isPreinfer = one.kind === 'preinfer';
    const took = (1e3 * (one.ended_s - one.arrived_s)).toFixed(1);
    picture.append(draw('text', {x: 0, y: y + 10}, isPreinfer ? `pre-infer, ${one.tokens} tokens`
      : `rank ${one.candidates || 'all'} by ${one.tokens}`));
    const total = Math.max(2, x(one.ended_s) - x(one.arrived_s));
    const busy = Math.max(1.5, Math.min(total, total * one.computed_s / Math.max(1e-9, one.ended_s - one.arrived_s)));
    const tone = isPreinfer ? 4 : color;
    const frame = draw('rect', {class: `outline s${tone}`, x: x(one.arrived_s), y, width: total, height: step - 5, rx: 2});
    const parts = Object.entries(one.parts_ms).map(([name, ms]) => `${name} ${ms.toFixed(2)}`).join(', ');
    frame.append(draw('title', {}, `${took} ms, ${(1e3 * one.computed_s).toFixed(1)} ms on the device, prefix: ${words}`
      + (parts && `\nbreakdown, ms: ${parts}`)));
    picture.append(frame, draw('rect', {class: isPreinfer ? 'outline s4' : `f${tone}`, x: x(one.ended_s) - busy, y, width: busy,
      height: step - 5, rx: 2}));
    picture.append(draw('text', {x: x(one.ended_s) + 5, y: y + 9}, `${took} ms`));
    const from = one.preinfer === null ? undefined : rows.get(`${one.role} ${one.preinfer}`);
    if (from !== undefined) {
      const source = shown[from];
      picture.append(draw('path', {class: 'link', d: `M ${x(source.ended_s)} ${4 + from * step + 10} L ${x(one.arrived_s)} ${y}`}));
    }
  });
  const legend = make('p', {class: 'legend'});
  for (const [color, words] of Object.values(SOURCES)) {
    legend.append(make('span', {}, make('i', {class: `swatch b${color}`}), words));
  }
  byId('relay').replaceChildren(picture, legend);
}

function compressed(shown, first, end) {
  // Maps seconds to a fraction of the width; periods with a request in progress get 90 % of it.
  const edges = [...new Set(shown.flatMap(one => [one.arrived_s, one.ended_s]))].sort((a, b) => a - b);
  const pieces = edges.slice(1).map((to, i) => ({from: edges[i], to,
    busy: shown.some(one => one.arrived_s <= edges[i] && one.ended_s >= to)}));
  const total = busy => pieces.filter(piece => piece.busy === busy).reduce((sum, p) => sum + p.to - p.from, 0);
  const [busy, idle] = [total(true), total(false)];
  const weight = piece => piece.busy ? (idle ? 0.9 : 1) * (piece.to - piece.from) / (busy || 1)
    : (busy ? 0.1 : 1) * (piece.to - piece.from) / (idle || 1);
  return seconds => pieces.reduce((sum, piece) => sum + weight(piece)
    * Math.max(0, Math.min(1, (seconds - piece.from) / (piece.to - piece.from || 1))), 0);
}

// Current status.

function showTiles(status, columns) {
  const last = (columns.at_s || []).length - 1, seconds = Math.min(10, last + 1);
  const recent = name => (columns[name] || []).slice(-seconds).reduce((sum, value) => sum + (value || 0), 0);
  const ranked = recent('from_device') + recent('from_host') + recent('from_none');
  const tile = (words, value) => make('div', {class: 'tile'}, make('b', {}, value), make('span', {}, words));
  byId('tiles').replaceChildren(
    tile('responses per second', seconds > 0 ? number(recent('ok') / seconds) : '-'),
    tile('P50 ms', number(status.latency.p50_ms)), tile('P99 ms', number(status.latency.p99_ms)),
    tile('prefix cache hits', ranked ? share((ranked - recent('from_none')) / ranked) : '-'),
    tile('routed to other instances', number(status.router.diverted + status.router.spilled)),
    tile('model age', age(last >= 0 ? columns.age_s[last] : null)));
}

function rowsOfFollowing(follow, row) {
  if (!follow) return;
  row('follows address', follow.address);
  row('version number', follow.behind > 0 ? `${follow.number}, ${follow.behind} behind` : follow.number);
  if (follow.problem) row('reason for the lag', follow.problem);
  const seconds = (value) => `${value.toFixed(2)} s`;
  if (follow.freshness_s !== null) row('from event to response', seconds(follow.freshness_s));
  for (const [part, value] of Object.entries(follow.parts_s)) {
    if (value !== null) row(`part: ${part}`, seconds(value));
  }
}

function showModels(models, follow) {
  byId('models').replaceChildren(...Object.entries(models).map(([role, model]) => {
    const table = make('table');
    const row = (name, value) => {
      const line = table.insertRow();
      line.insertCell().textContent = name;
      const cell = line.insertCell();
      cell.className = 'number';
      cell.textContent = value;
    };
    row('version', model.version);
    row('loaded at', new Date(1e3 * model.loaded_at_s).toLocaleString());
    rowsOfFollowing(follow[role], row);
    row('device cache', `${number(model.device_pages_used)} of ${number(model.device_pages)} pages`);
    row('host cache', `${number(model.host_bytes_used / 1e6)} of ${number(model.host_bytes / 1e6)} MB`);
    row('reload from host pays off', model.break_even_tokens ? `from ${model.break_even_tokens} tokens` : 'never');
    if (model.precision) {
      const {dtype, tables, prefixes, overlap, metric, before, after} = model.precision;
      const score = (value) => value === null ? '-' : value.toFixed(4);
      row('dtype of weights, tables, KV cache', `${dtype}, ${tables}, ${prefixes}`);
      row('top-10 overlap after quantization', share(overlap));
      row(`${metric} before and after`, `${score(before)}, ${score(after)}`);
    }
    for (const [name, count] of Object.entries(model.counts).sort()) row(name.replaceAll('_', ' '), number(count));
    return make('div', {class: 'card'}, make('h3', {}, role), table);
  }));
}

async function show() {
  try {
    const answer = await ask(slot === '' ? '/v1/live' : `/v1/live?slot=${slot}`);
    if (answer.status === 401 || answer.status === 403) {
      byId('login').hidden = false;
      byId('state').textContent = key ? 'this API key is not authorized for the live page' : 'this server requires an API key';
    } else if (!answer.ok) {
      throw new Error(answer.status);
    } else {
      const data = await answer.json();
      if (slot === '' && answer.headers.has('x-nestrec-slot')) findSlots();
      byId('login').hidden = true;
      showTiles(data.status, data.timeline);
      showCharts(data.timeline);
      showRelay(data.relay);
      showModels(data.status.models, data.status.follow);
      byId('state').textContent = `live, ${new Date().toLocaleTimeString()}`;
    }
  } catch (error) {
    byId('state').textContent = 'the server is not responding';
  }
  setTimeout(show, 1000);
}

async function findSlots() {  // a gateway has several instances
  const answer = await ask('/v1/gateway').catch(() => null);
  if (!answer || !answer.ok) return;
  const {alive} = await answer.json();
  byId('slot').replaceChildren(...alive.map((_, i) => make('option', {value: i}, String(i))));
  byId('slots').hidden = false;
  slot = '0';
}

byId('slot').addEventListener('change', event => { slot = event.target.value; });
byId('login').addEventListener('submit', event => {
  event.preventDefault();
  key = byId('key').value;
  byId('key').value = '';
  prepareTry();
});

// Form to try requests.

async function prepareTry() {
  const answer = await ask('/openapi.json').catch(() => null);
  if (!answer || !answer.ok) return;
  const examples = {};
  for (const [path, methods] of Object.entries((await answer.json()).paths)) {
    const content = methods.post && !path.startsWith('/v1/admin/') && methods.post.requestBody;
    const example = content && content.content['application/json'].example;
    if (example) examples[path] = example;
  }
  byId('route').replaceChildren(...Object.keys(examples).map(path => make('option', {}, path)));
  const fill = () => {
    byId('body').value = JSON.stringify(examples[byId('route').value], null, 1);
    showHistory();
  };
  byId('route').onchange = fill;
  fill();
}

function bodyNow() {
  try { return JSON.parse(byId('body').value); } catch (error) { return null; }
}

async function learnTitles(items) {
  const unknown = items.filter(item => !(item in titles));
  if (!unknown.length) return;
  const answer = await ask('/v1/titles', JSON.stringify({items: unknown})).catch(() => null);
  for (const item of unknown) titles[item] = '';
  if (answer && answer.ok) Object.assign(titles, (await answer.json()).titles);
}

async function showHistory() {
  const body = bodyNow(), items = ((body && body.history && body.history.items) || []).map(String).slice(-30);
  await learnTitles(items);
  byId('history').replaceChildren(...items.map(item => make('span', {}, titles[item] || item)));
}

let searched = 0;
byId('search').addEventListener('input', async event => {
  const turn = ++searched, words = event.target.value.trim();
  if (!words) { byId('found').replaceChildren(); return; }
  const answer = await ask('/v1/titles', JSON.stringify({items: [], search: words})).catch(() => null);
  if (turn !== searched || !answer || !answer.ok) return;
  const found = Object.entries((await answer.json()).titles);
  byId('found').replaceChildren(...(found.length ? found.map(([item, title]) => {
    const chosen = make('button', {type: 'button'}, title);
    chosen.addEventListener('click', () => addItem(item, title));
    return chosen;
  }) : [make('span', {}, 'no matching titles')]));
});

function addItem(item, title) {
  const body = bodyNow();
  if (!body) return;
  titles[item] = title;
  const history = body.history = body.history || {items: [], times_ms: []};
  history.items = [...(history.items || []), item];
  if (history.times_ms) history.times_ms = [...history.times_ms, Date.now()];
  byId('body').value = JSON.stringify(body, null, 1);
  showHistory();
}

byId('body').addEventListener('change', showHistory);
byId('try').addEventListener('submit', async event => {
  event.preventDefault();
  const start = performance.now(), request = bodyNow();
  const answer = await ask(byId('route').value, byId('body').value).catch(() => null);
  const took = (performance.now() - start).toFixed(1), outcome = byId('outcome');
  if (!answer) { outcome.textContent = 'the server is not responding'; return; }
  const response = await answer.json().catch(() => ({}));
  outcome.className = answer.ok ? '' : 'problem';
  outcome.textContent = `${answer.status} in ${took} ms, request ${answer.headers.get('x-request-id')}`
    + (response.error ? `: ${response.error.field ? response.error.field + ' ' : ''}${response.error.message}`
      + (response.error.remedy ? ` (${response.error.remedy})` : '') : '');
  await showScores(response, request);
  byId('raw').hidden = false;
  byId('raw').textContent = JSON.stringify(response, null, 1);
});

async function showScores(response, request) {
  const items = (response.items || (response.scores && request && request.candidates) || []).map(String);
  const outputs = Object.entries(response.scores || {});
  await learnTitles(items);
  const named = items.some(item => titles[item]), table = byId('results');
  if (!items.length) { table.replaceChildren(); return; }
  const head = make('tr', {}, ...['', 'item', ...(named ? ['title'] : []), ...outputs.map(([name]) => name)]
    .map(words => make('th', {}, words)));
  table.replaceChildren(head, ...items.map((item, i) => make('tr', {}, make('td', {}, String(i + 1)),
    make('td', {}, item), ...(named ? [make('td', {}, titles[item] || '')] : []),
    ...outputs.map(([, scores]) => make('td', {}, scores[i] < -1e38 ? 'last' : scores[i].toFixed(4))))));
}

prepareTry();
show();
