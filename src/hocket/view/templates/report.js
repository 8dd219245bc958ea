/* The timeline of the report: what is shown, how it moves, what the pointer is on. */
(() => {
  const data = JSON.parse(document.getElementById('data').textContent);
  const plot = document.getElementById('plot');
  const status = document.getElementById('view-status');
  const { PHASES, CLASSES, bytes, percent, tickStep, shortEnd, shortMiddle } = hocketPaint;
  const seconds = (ticks) => hocketPaint.seconds(ticks * data.tick_s);
  const SVG_LIMIT = 5000;
  const total = Math.max(data.end, 1);
  const view = { from: 0, to: total, onlyPath: false };
  const numMarks = data.rows.reduce((sum, row) => sum + row.start.length, 0);
  let geometry = null;
  let selected = -1;

  // ── where things stand ───────────────────────────────────────────────────────────────────
  for (const row of data.rows) {
    row.longest = row.length.reduce((most, length) => Math.max(most, length), 0);
    row.criticalKeys = new Set(row.critical.start.map((start, i) => `${start}/${row.critical.track[i]}`));
  }

  function layout() {
    const width = Math.max(plot.clientWidth, 200);
    const narrow = width < 640;
    const left = narrow ? 0 : 190;
    let top = 28;
    const rows = data.rows.map((row) => {
      const label = top;
      if (narrow) top += 16;
      const height = row.link ? Math.max(12, Math.min(3 * row.tracks, 30)) : 24;
      const place = { label, top, height, memoryTop: 0, memoryHeight: 0 };
      top += height;
      if (!row.link) { place.memoryTop = top + 4; place.memoryHeight = 26; top += 30; }
      top += row.link ? 8 : 14;
      return place;
    });
    return { width, narrow, left, right: width - 1, height: top, rows };
  }

  const scaleX = () => (geometry.right - geometry.left) / (view.to - view.from);
  const timeAt = (x) => view.from + (x - geometry.left) / scaleX();

  /** First index whose value is not below the wanted one. */
  function lowerBound(values, wanted) {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low;
  }

  // ── a frame: what is to be painted, the same for SVG and canvas ──────────────────────────

  function newFrame() {
    const rects = Object.fromEntries(['track', ...CLASSES, 'critical'].map((name) => [name, []]));
    const { width, height } = geometry;
    return { width, height, onlyPath: view.onlyPath, rects, grid: [], areas: [], lines: [], texts: [] };
  }

  function clampedRect(into, x0, x1, y, height) {
    const left = Math.max(x0, geometry.left), right = Math.min(x1, geometry.right);
    if (right > left) into.push(left, y, right - left, height);
  }

  function addMarks(frame, row, place) {
    const k = scaleX(), trackHeight = place.height / row.tracks;
    // Marks narrower than a pixel are drawn together, as high as they fill the span that they cover.
    const pending = new Map();
    let named = false;
    const flush = (track) => {
      const run = pending.get(track);
      if (!run) return;
      const fill = Math.max(0.12, Math.min(1, run.busy / (run.x1 - run.x0))) * trackHeight;
      clampedRect(frame.rects[run.name], run.x0, Math.max(run.x1, run.x0 + 0.35), place.top + (track + 1) * trackHeight - fill, fill);
      pending.delete(track);
    };
    for (let i = lowerBound(row.start, view.from - row.longest); i < row.start.length && row.start[i] < view.to; i += 1) {
      const x0 = geometry.left + (row.start[i] - view.from) * k;
      const wide = row.length[i] * k;
      if (x0 + wide < geometry.left) continue;
      const track = row.track ? row.track[i] : 0;
      const name = row.link ? 'transfer' : PHASES[data.ops.phase[row.span[i]]];
      const busy = row.busy ? row.busy[i] : 1;
      if (wide < 1) {
        if (pending.has(track) && x0 + wide - pending.get(track).x0 > 1) flush(track);
        const run = pending.get(track) || { x0, x1: x0, busy: 0, longest: 0, name };
        run.x1 = x0 + wide;
        run.busy += wide * busy;
        if (wide > run.longest) { run.longest = wide; run.name = name; }
        pending.set(track, run);
        continue;
      }
      flush(track);
      const shown = wide > 4 ? wide - 0.7 : wide;
      const high = Math.max(trackHeight - (trackHeight > 6 ? 1 : 0), 0.6) * Math.max(busy, 0.12);
      clampedRect(frame.rects[name], x0, x0 + shown, place.top + (track + 1) * trackHeight - high, high);
      if (wide > 52 && trackHeight > 14 && !row.link) { named = true; addMarkLabel(frame, row, i, x0, x0 + shown, place); }
    }
    for (const track of [...pending.keys()]) flush(track);
    if (!named && !row.link) addPassLabels(frame, data.passes[row.index], place, k);
    addCritical(frame, row, place, k);
  }

  /** F0, B0: passes of microbatches, where single ops have no room for their names. */
  function addPassLabels(frame, passes, place, k) {
    for (const [start, end, label] of passes) {
      const x = geometry.left + (start - view.from) * k;
      if ((end - start) * k < 18 || x < geometry.left || x > geometry.right - 18) continue;
      frame.texts.push(['mark-label', x + 3, place.top + 15.5, label, 'start']);
    }
  }

  function addBound(frame) {
    const x = geometry.left + (data.bound - view.from) * scaleX();
    if (data.bound === null || x < geometry.left || x > geometry.right) return;
    frame.lines.push(['capacity', [[x, 18], [x, geometry.height]]]);
    frame.texts.push(['muted', x - 3, 25, 'lower bound', 'end']);
  }

  /** Mean width of a letter of the labels in the font that the reader has. */
  function letterWidth() {
    if (!letterWidth.px) {
      const context = document.createElement('canvas').getContext('2d');
      context.font = `11px ${getComputedStyle(plot).fontFamily}`;
      const letters = 'abcdefghijklmnopqrstuvwxyz_0123456789';
      letterWidth.px = context.measureText(letters).width / letters.length * 1.06;
    }
    return letterWidth.px;
  }

  function addMarkLabel(frame, row, i, x0, x1, place) {
    const left = Math.max(x0, geometry.left) + 5, room = Math.min(x1, geometry.right) - left - 3;
    const letters = Math.floor(room / letterWidth());
    if (letters < 4) return;
    const name = row.count && row.count[i] > 1 ? `${row.count[i]} ops` : data.ops.name[row.span[i]];
    // The end of a name tells ops apart; its beginning is mostly the module.
    const text = name.length > letters ? `…${name.slice(1 - letters)}` : name;
    frame.texts.push(['mark-label', left, place.top + 15.5, text, 'start']);
  }

  function addCritical(frame, row, place, k) {
    const { start, length } = row.critical;
    let lastX = -1;
    for (let i = 0; i < start.length; i += 1) {
      const x0 = geometry.left + (start[i] - view.from) * k;
      const x1 = Math.max(x0 + length[i] * k, x0 + 0.8);
      if (x1 < geometry.left || x0 > geometry.right || x1 - lastX < 0.5) continue;
      lastX = x1;
      clampedRect(frame.rects.critical, x0, x1, place.top + place.height + 0.5, 2);
    }
  }

  function addMemory(frame, device, place) {
    const { time, held } = device.memory;
    const limit = Math.max(device.capacity_bytes, device.peak_bytes, 1);
    const bottom = place.memoryTop + place.memoryHeight;
    const y = (value) => bottom - place.memoryHeight * value / limit;
    const x = (at) => Math.max(geometry.left, Math.min(geometry.right, geometry.left + (at - view.from) * scaleX()));
    const points = [];
    for (let i = Math.max(lowerBound(time, view.from) - 1, 0); i < time.length && time[i] <= view.to; i += 1) {
      const until = i + 1 < time.length ? time[i + 1] : total;
      points.push([x(time[i]), y(held[i])], [x(until), y(held[i])]);
    }
    if (!points.length) return;
    frame.areas.push(['memory', [[points[0][0], bottom], ...points, [points.at(-1)[0], bottom]]]);
    frame.lines.push(['memory-line', points]);
    const over = device.peak_bytes > device.capacity_bytes ? 'capacity over' : 'capacity';
    frame.lines.push([over, [[geometry.left, y(device.capacity_bytes)], [geometry.right, y(device.capacity_bytes)]]]);
  }

  function addLabels(frame, row, place) {
    const room = Math.floor((geometry.narrow ? geometry.width * (row.link ? 0.8 : 0.4) : geometry.left - 50) / letterWidth());
    const name = row.link ? shortMiddle(row.label, room) : shortEnd(row.label, room);
    const base = geometry.narrow ? place.label + 11 : place.top + Math.min(place.height, 24) / 2 + 4;
    frame.texts.push([row.link ? 'small' : 'label', 0, base, name, 'start']);
    if (geometry.narrow) {
      const note = row.memory_note ? `${row.note} busy · ${row.memory_note}` : row.note;
      frame.texts.push([row.over ? 'over' : 'muted', geometry.right, base, note, 'end']);
      return;
    }
    frame.texts.push(['muted', geometry.left - 10, base, row.note, 'end']);
    if (row.memory_note) frame.texts.push([row.over ? 'over' : 'muted', 0, place.memoryTop + 15, row.memory_note, 'start']);
  }

  function addAxis(frame) {
    const step = tickStep(view.to - view.from, Math.max(2, Math.floor((geometry.right - geometry.left) / 90)));
    for (let n = Math.ceil(view.from / step); n * step <= view.to; n += 1) {
      const x = geometry.left + (n * step - view.from) * scaleX();
      frame.grid.push(x);
      if (x < geometry.right - 46) frame.texts.push(['muted', x + 3, 13, seconds(n * step), 'start']);
    }
  }

  function compose() {
    geometry = layout();
    const frame = newFrame();
    addAxis(frame);
    data.rows.forEach((row, index) => {
      const place = geometry.rows[index];
      frame.rects.track.push(geometry.left, place.top, geometry.right - geometry.left, place.height);
      addMarks(frame, row, place);
      if (!row.link) addMemory(frame, data.devices[row.index], place);
      addLabels(frame, row, place);
    });
    addBound(frame);
    return frame;
  }

  const painter = numMarks <= SVG_LIMIT ? hocketPaint.svgPainter() : hocketPaint.canvasPainter();

  function draw() {
    painter.paint(compose());
    plot.dataset.from = view.from;
    plot.dataset.to = view.to;
    const whole = view.from === 0 && view.to === total;
    status.textContent = whole ? `whole step, ${seconds(total)}` : `${seconds(view.from)} to ${seconds(view.to)} of ${seconds(total)}`;
  }

  // ── moving ───────────────────────────────────────────────────────────────────────────────

  function show(from, to) {
    const length = Math.min(Math.max(to - from, Math.min(total, 20)), total);
    const start = Math.min(Math.max(from, 0), total - length);
    view.from = start;
    view.to = start + length;
    hideTip();
    draw();
  }

  function zoom(factor, around) {
    const at = around === undefined ? (view.from + view.to) / 2 : around;
    show(at - (at - view.from) * factor, at + (view.to - at) * factor);
  }

  function pan(share) {
    const by = (view.to - view.from) * share;
    show(view.from + by, view.to + by);
  }

  function togglePath() {
    view.onlyPath = !view.onlyPath;
    document.getElementById('focus-path').setAttribute('aria-pressed', String(view.onlyPath));
    draw();
  }

  function showStep(number) {
    if (!data.path.length) return;
    selected = Math.min(Math.max(number, 0), data.path.length - 1);
    const step = data.path[selected];
    const context = Math.max(step.length * 3, total / 200);
    show(step.start + step.length / 2 - context, step.start + step.length / 2 + context);
    const place = step.row >= 0 ? geometry.rows[step.row] : { top: 28, height: 0 };
    const x = geometry.left + (step.start + step.length / 2 - view.from) * scaleX();
    showTip([step.name, `${step.kind} on the critical path, ${selected + 1} of ${data.path.length}`, span(step.start, step.length), step.reason], x, place.top + place.height);
    status.textContent = `${step.name}: ${span(step.start, step.length)}`;
  }

  // ── the tip ──────────────────────────────────────────────────────────────────────────────

  const tip = document.createElement('div');
  tip.id = 'tip';
  tip.setAttribute('role', 'tooltip');
  tip.hidden = true;

  function hideTip() { tip.hidden = true; }

  function showTip(lines, x, y) {
    tip.replaceChildren(...lines.filter(Boolean).map((line, i) => {
      const node = document.createElement(i ? 'span' : 'strong');
      node.textContent = line;
      return node;
    }));
    tip.hidden = false;
    const room = plot.clientWidth - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(x + 14, room))}px`;
    tip.style.top = `${y + 14}px`;
  }

  const span = (start, length) => `${seconds(start)} to ${seconds(start + length)}, ${seconds(length)}`;

  function markAt(row, place, x, y) {
    const time = timeAt(x), slack = 2 / scaleX();
    const track = Math.min(row.tracks - 1, Math.floor((y - place.top) / (place.height / row.tracks)));
    let best = -1, distance = slack;
    for (let i = lowerBound(row.start, time - row.longest - slack); i < row.start.length && row.start[i] <= time + slack; i += 1) {
      if (row.track && row.track[i] !== track) continue;
      const away = Math.max(row.start[i] - time, time - row.start[i] - row.length[i], 0);
      if (away <= distance) { best = i; distance = away; }
    }
    return best;
  }

  function describeMark(row, i) {
    const many = row.count && row.count[i] > 1;
    const index = row.span[i], track = row.track ? row.track[i] : 0;
    const when = span(row.start[i], row.length[i]);
    if (many) {
      const longest = row.link ? data.transfers.tensor[index] : data.ops.name[index];
      return [`${row.count[i]} ${row.link ? 'transfers' : 'ops'}`, when, `busy ${percent(row.busy[i])} of it`, `longest: ${longest}`];
    }
    const critical = row.criticalKeys.has(`${row.start[i]}/${track}`) ? 'on the critical path' : '';
    if (row.link) {
      const t = data.transfers;
      return [t.tensor[index], `${bytes(t.bytes[index])}, ${data.devices[t.src[index]].name} → ${data.devices[t.dst[index]].name}`, when, critical];
    }
    const module = data.modules[data.ops.module[index]];
    return [data.ops.name[index], `${data.kinds[data.ops.kind[index]]}, ${PHASES[data.ops.phase[index]]}`, module, when, critical];
  }

  function hover(x, y) {
    const number = geometry.rows.findIndex((place) => y >= place.top && y < Math.max(place.top + place.height, place.memoryTop + place.memoryHeight));
    if (number < 0 || x < geometry.left) { hideTip(); return; }
    const row = data.rows[number], place = geometry.rows[number];
    if (y < place.top + place.height) {
      const mark = markAt(row, place, x, y);
      if (mark < 0) hideTip(); else showTip(describeMark(row, mark), x, y);
      return;
    }
    const device = data.devices[row.index], time = timeAt(x);
    const at = Math.max(lowerBound(device.memory.time, time + 1e-9) - 1, 0);
    showTip([`${bytes(device.memory.held[at])} held`, `${device.name}, ${bytes(device.capacity_bytes)} in all`, `at ${seconds(time)}`], x, y);
  }

  // ── hands ────────────────────────────────────────────────────────────────────────────────

  const brush = document.createElement('div');
  brush.id = 'brush';
  brush.hidden = true;
  let dragFrom = null;

  function pointer(event) {
    const box = plot.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  plot.addEventListener('pointerdown', (event) => {
    if (event.button !== 0) return;
    [dragFrom] = pointer(event);
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener('pointermove', (event) => {
    const [x, y] = pointer(event);
    if (dragFrom === null) { hover(x, y); return; }
    hideTip();
    brush.hidden = Math.abs(x - dragFrom) < 5;
    brush.style.left = `${Math.max(Math.min(x, dragFrom), geometry.left)}px`;
    brush.style.width = `${Math.min(Math.max(x, dragFrom), geometry.right) - Math.max(Math.min(x, dragFrom), geometry.left)}px`;
    brush.style.top = '18px';
    brush.style.height = `${geometry.height - 22}px`;
  });
  plot.addEventListener('pointerup', (event) => {
    if (dragFrom === null) return;
    const [x, y] = pointer(event);
    const ends = [timeAt(Math.min(x, dragFrom)), timeAt(Math.max(x, dragFrom))];
    const dragged = Math.abs(x - dragFrom) >= 5;
    dragFrom = null;
    brush.hidden = true;
    if (dragged) show(Math.max(ends[0], view.from), Math.min(ends[1], view.to)); else hover(x, y);
  });
  plot.addEventListener('pointercancel', () => { dragFrom = null; brush.hidden = true; });
  plot.addEventListener('pointerleave', () => { if (dragFrom === null) hideTip(); });
  plot.addEventListener('dblclick', () => show(0, total));
  plot.addEventListener('wheel', (event) => {
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      pan(event.deltaX / geometry.width);
    } else if (event.ctrlKey || event.metaKey || document.activeElement === plot) {
      // Without focus the wheel scrolls the page: a plot must not hold the reader up.
      event.preventDefault();
      zoom(Math.exp(event.deltaY / 400), timeAt(Math.max(pointer(event)[0], geometry.left)));
    }
  }, { passive: false });
  plot.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      ArrowLeft: () => pan(event.shiftKey ? -0.5 : -0.1),
      ArrowRight: () => pan(event.shiftKey ? 0.5 : 0.1),
      '+': () => zoom(0.7), '=': () => zoom(0.7), '-': () => zoom(1 / 0.7), '−': () => zoom(1 / 0.7),
      0: () => show(0, total), Home: () => show(0, total),
      n: () => showStep(selected + 1), p: () => showStep(selected - 1),
      c: togglePath, Escape: hideTip,
    };
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });

  const on = (id, action) => document.getElementById(id).addEventListener('click', action);
  on('zoom-in', () => zoom(0.6));
  on('zoom-out', () => zoom(1 / 0.6));
  on('zoom-all', () => show(0, total));
  on('focus-path', togglePath);
  for (const button of document.querySelectorAll('button[data-step]')) {
    button.addEventListener('click', () => {
      showStep(Number(button.dataset.step));
      plot.scrollIntoView({ block: 'center' });
      plot.focus({ preventScroll: true });
    });
  }

  plot.append(painter.root, brush, tip);
  document.getElementById('static-timeline').hidden = true;
  document.getElementById('live').hidden = false;
  new ResizeObserver(draw).observe(plot);
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
  draw();
})();
