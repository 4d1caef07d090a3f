#pragma once
float exp(float x);
float log(float x);
